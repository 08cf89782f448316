"""The only code that talks to the database.

tables.py declares the tables and records.py the values that go in and out. database/ opens the file, files/ keeps
artifacts and uploads beside it, queue/ changes the states of jobs (transitions.py), reading/ only reads, and keeping/
decides what is deleted. Nothing outside this folder writes SQL or opens a connection.
"""
