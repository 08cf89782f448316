"""The only code that talks to the database.

tables.py declares it, engine.py opens it, queue.py is the state machine, and the other modules read. Nothing outside
this folder writes SQL or opens a connection.
"""
