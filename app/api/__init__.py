"""HTTP routers, one per resource, over app.store. No SQL and no state of its own lives here."""
