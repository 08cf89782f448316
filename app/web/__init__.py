"""Pages for people, in Jinja2 and htmx: readable without JavaScript, and nothing from anybody else's server."""
