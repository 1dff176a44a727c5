"""The documentation site in a browser, on a desk and on a phone."""

from collections.abc import Iterator
import functools
import http.server
import os
from pathlib import Path
import shutil
import subprocess
import sys
import threading

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = [
  str(path.relative_to(_ROOT / 'docs').with_suffix(''))
  for pattern in ('docs/*.md', 'docs/notebooks/*.ipynb')
  for path in sorted(_ROOT.glob(pattern))
]
# Widths in CSS pixels.
_DESK, _PHONE = 1280, 390
_CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
_FLAGS = """
  --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
  --disable-background-networking --disable-component-update
"""

pytest.importorskip('sphinx', reason='needs the group docs')
sync_api = pytest.importorskip(
  'playwright.sync_api', reason='needs the group docs'
)
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(_CHROMIUM is None, reason='needs Chromium'),
]


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
  """Serves the site in MERIT_BUILT_DOCS, or builds it."""
  if built := os.environ.get('MERIT_BUILT_DOCS'):
    folder = Path(built) / 'html'
  else:
    folder = tmp_path_factory.mktemp('site') / 'html'
    subprocess.run(
      [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-n', '-q']
      + ['docs', folder],
      cwd=_ROOT,
      check=True,
    )
  handler = functools.partial(
    http.server.SimpleHTTPRequestHandler, directory=folder
  )
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


@pytest.fixture(scope='module')
def browser() -> Iterator[sync_api.Browser]:
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=_CHROMIUM, args=_FLAGS.split()
    )
    yield browser
    browser.close()


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
  with browser.new_context() as context:
    yield context.new_page()


@pytest.mark.parametrize('name', _PAGES)
def test_page(name, page, site):
  errors, requests = [], []
  page.on('pageerror', lambda error: errors.append(str(error)))
  page.on(
    'console', lambda x: errors.append(x.text) if x.type == 'error' else None
  )
  page.on('requestfailed', lambda request: errors.append(request.url))
  page.on('request', lambda request: requests.append(request.url))
  page.goto(f'{site}/{name}.html', wait_until='networkidle')

  assert not errors
  # Not even fonts or scripts from elsewhere: the site works offline.
  assert all(url.startswith((site, 'data:')) for url in requests), requests
  assert not page.evaluate(
    '[...document.images].filter(x => !x.naturalWidth).map(x => x.src)'
  )
  # Each equation has a size, and no TeX is left on the page.
  assert not page.evaluate(
    "[...document.querySelectorAll('article math')]"
    '.filter(x => !x.getBoundingClientRect().width)'
    '.map(x => x.textContent)'
  )
  assert '\\frac' not in page.inner_text('article')


@pytest.mark.parametrize('name', _PAGES)
@pytest.mark.parametrize('width', [_DESK, _PHONE])
def test_nothing_is_cut(width, name, page, site):
  page.set_viewport_size({'width': width, 'height': 844})
  page.goto(f'{site}/{name}.html')
  # On a phone, wide tables scroll by themselves.
  wide = page.evaluate(
    "[document.scrollingElement, ...document.querySelectorAll('article table')]"
    '.filter(x => x.scrollWidth > x.clientWidth)'
    '.map(x => x.innerText.slice(0, 100))'
    if width == _DESK
    else 'document.scrollingElement.scrollWidth > window.innerWidth'
  )
  assert not wide


def test_subscripts_are_lower_than_letters(page, site):
  page.goto(f'{site}/merit.html')
  drops = page.locator('article math msub').evaluate_all(
    'found => found.map(x => [...x.children].map('
    'y => y.getBoundingClientRect())).map(([x, y]) => y.bottom - x.bottom)'
  )
  assert drops and min(drops) > 1


def test_equations_are_there(page, site):
  for name in ('merit', 'api'):
    page.goto(f'{site}/{name}.html')
    assert page.locator('article math').count() > 5


@pytest.mark.parametrize(
  'name, link',
  [
    ('index', '/settings.html'),
    ('cost', '/blob/main/benchmarks/results'),
  ],
)
def test_links_between_pages_and_into_the_repository(name, link, page, site):
  page.goto(f'{site}/{name}.html')
  links = page.locator('article a').evaluate_all('x => x.map(a => a.href)')
  assert any(x.endswith(link) for x in links)
