"""The cost of outages, before and after: ledgers, price sheets, estimates, reports, pages."""
