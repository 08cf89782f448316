"""HTTP routers, one per resource, over app.store. It contains no SQL and keeps no state."""
