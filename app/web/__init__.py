"""Pages for people, in Jinja2 and htmx: readable without JavaScript, and with no file from another server."""
