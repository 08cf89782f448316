"""The devices of a host, and the locks on them."""
