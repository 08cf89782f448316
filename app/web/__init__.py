"""Pages for people, in Jinja2, htmx and Pico.css: readable without JavaScript, and with no file from another server.

How to add a page: docs/how-to-add-a-page.md.
"""
