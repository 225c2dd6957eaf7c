"""What an outage will cost and did: ledgers, price sheets, estimates, reports, pages."""
