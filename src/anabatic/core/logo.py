"""The logo: a current of air that rises along a slope, in one tile for light and dark backgrounds.

Every page, the documentation and the READMEs show this picture; `docs/*/assets/logo.svg` is written from it.
"""

from __future__ import annotations

from urllib.parse import quote

_SHAPES = (
    '<rect width="24" height="24" rx="5.5" fill="#0b6b78" stroke="none"/>'
    '<path d="M0 18.5C10 18.5 13 13 24 11V18.5A5.5 5.5 0 0 1 18.5 24H5.5A5.5 5.5 0 0 1 0 18.5Z" fill="#7fd0d6" '
    'stroke="none"/>'
    '<path d="M4.5 13.5C11 13.5 12.5 6 19.5 5.5" fill="none" stroke="#fff" stroke-width="2.6" stroke-linecap="round"/>'
)
LOGO_SVG = f'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64" viewBox="0 0 24 24">{_SHAPES}</svg>\n'
"""A file."""
INLINE_LOGO = f'<svg class="logo" viewBox="0 0 24 24" aria-hidden="true">{_SHAPES}</svg>'
"""An element of a page; the name that follows it says what a screen reader needs."""
FAVICON_URL = "data:image/svg+xml," + quote(LOGO_SVG.strip(), safe=" =:/'").replace("%22", "'")
"""For `<link rel="icon">` of a page that loads nothing."""
