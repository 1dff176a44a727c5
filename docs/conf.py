"""Settings of the documentation site, which `make docs` builds."""

import os
from pathlib import Path
import re
import tomllib

from docutils import nodes
from docutils.writers.html5_polyglot import HTMLTranslator
from sphinx.application import Sphinx

import merit_optax

_DOCS = Path(__file__).resolve().parent
_ROOT = _DOCS.parent
_PROJECT = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
_REPOSITORY = _PROJECT['urls']['Repository']

project = _PROJECT['name']
author = copyright = f'The authors of {project}'
version = release = merit_optax.__version__

extensions = [
  'myst_nb',
  'sphinx.ext.autodoc',
  'sphinx.ext.autosummary',
  'sphinx.ext.napoleon',
  'sphinx_copybutton',
]
exclude_patterns = ['_build', 'notebooks/*.md']
# Their pages are elsewhere, and a build must work offline: no links to them.
nitpick_ignore_regex = [('py:.*', r'(jax|optax|collections)\..*')]
# Notebooks that are not run count as plain Python, which has no `%pip`.
suppress_warnings = ['misc.highlighting_failure']

autodoc_typehints = 'none'
copybutton_prompt_is_regexp = True
copybutton_prompt_text = r'>>> |\.\.\. '
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 4

# Notebooks are committed with their outputs, from `make notebooks`.
nb_execution_mode = 'off'
# Outputs in Markdown may be tables.
nb_render_markdown_format = 'myst'

html_context = {'default_mode': 'auto'}
html_css_files = ['site.css']
html_favicon = '_static/icon.svg'
html_math_renderer = 'mathml'
html_static_path = ['_static']
html_theme = 'sphinx_book_theme'
html_theme_options = {
  'navbar_persistent': [],
  'launch_buttons': {'colab_url': 'https://colab.research.google.com'},
  'repository_branch': 'main',
  'repository_url': _REPOSITORY,
  'use_repository_button': True,
}
html_title = f'{project} {version}'

# What search engines and previews of links show.
_DESCRIPTION = _PROJECT['description']
_PICTURE = f'{_REPOSITORY}/raw/main/examples/study/ladder_carried.png'
myst_html_meta = {
  'description': _DESCRIPTION,
  'property=og:title': project,
  'property=og:description': _DESCRIPTION,
  'property=og:image': _PICTURE,
  'property=og:url': _PROJECT['urls']['Documentation'],
}

# The theme has a button for it, and its picture is not of this site.
_BADGE = re.compile(r'\[!\[Open in Colab\]\(\S+\)\]\(\S+?\)')
_FILES = f'{_REPOSITORY}/blob/main/'
_LINK = re.compile(r'(!?\[[^\]]*\]\()([^)\s#]+)')
# Notebooks, without the suffix, since Sphinx would look for the file behind the
# link.
_PAGES = {
  path.resolve(): path.with_suffix('')
  for path in _DOCS.glob('notebooks/*.ipynb')
}


def setup(app: Sphinx) -> None:
  """Adds what no extension does."""
  app.connect('source-read', _read_page)
  app.add_html_math_renderer('mathml', (_visit_math, None), (_visit_math, None))


def _read_page(app: Sphinx, docname: str, source: list[str]) -> None:
  source[0] = _resolve_links(source[0], Path(app.env.doc2path(docname)).parent)


def _resolve_links(text: str, folder: Path) -> str:
  """Makes the links that a file has in the repository work on the site.

  Args:
    text: Text of the file.
    folder: Folder of the file, to which its links are relative.

  Returns:
    The text, with links to pages and images as paths from the folder of the
    site, and links to other files into the repository. Links to what does not
    exist stay, for Sphinx to complain about.
  """

  def resolve(match: re.Match[str]) -> str:
    start, link = match.groups()
    # Notebooks have whole addresses, since Colab knows no others.
    base = _ROOT if link.startswith(_FILES) else folder
    target = (base / link.removeprefix(_FILES)).resolve()
    if not target.exists():
      return match[0]
    target = _PAGES.get(target, target)
    if start.startswith('!') or target.is_relative_to(_DOCS):
      return f'{start}/{os.path.relpath(target, _DOCS)}'
    return f'{start}{_FILES}{target.relative_to(_ROOT)}'

  return _LINK.sub(resolve, _BADGE.sub('', text))


def _visit_math(translator: HTMLTranslator, node: nodes.Node) -> None:
  """Writes MathML, which browsers show without scripts, fonts or a network."""
  translator.math_output, translator.math_options = 'mathml', ''
  HTMLTranslator.visit_math(translator, node)
