"""The only code that talks to the database.

tables.py declares the tables, engine.py opens the database, queue.py is the state machine, and the other modules read.
Nothing outside this folder writes SQL or opens a connection.
"""
