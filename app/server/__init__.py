"""The process of the server: how it starts, its connections and its logs."""
