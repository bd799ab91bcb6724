"""Certified prediction as a service: `smoothcert serve`.

`rule.py` says what each look at the votes may claim, `engine.py` shares forward passes among requests, `log.py` records
every answer, `app.py` speaks HTTP, and `page/` holds the page for people.
"""
