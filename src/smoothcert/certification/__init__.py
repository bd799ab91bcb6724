"""Certify or attack a data set; write, resume, merge and recertify certificates files."""
