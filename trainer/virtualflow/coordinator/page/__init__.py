"""The live page of a job in a browser: what it shows, its files, and the answers to browsers.

A coordinator that was installed without this package serves everything else.
"""
