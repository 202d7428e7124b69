"""Template filters of all pages: numbers, times and intervals in the house format."""

from __future__ import annotations

from django import template

register = template.Library()
