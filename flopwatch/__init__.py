"""The client of a Flopwatch server: `from flopwatch import Flopwatch`."""
