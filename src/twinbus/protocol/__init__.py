"""The commands of a namespace and their encoding, as clients and servers use them."""
