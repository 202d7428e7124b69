"""The dashboard: what was tried, seen in a browser.

In: records, from a folder on this machine (`follow`) or over HTTP from clients (`ingest`). Out: pages, a read API and
downloads. It knows records and how to draw them, and nothing of training.
"""
