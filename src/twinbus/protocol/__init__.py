"""What a namespace can be asked, and how it travels. Clients and servers import it alike."""
