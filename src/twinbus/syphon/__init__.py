"""The syphon: brings diverted messages home, on Spark."""
