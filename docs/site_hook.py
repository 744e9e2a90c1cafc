"""MkDocs hook of the site: README pages and pictures from outside of docs/, and links that lead out of it.

A page of the site is a document of the repository, with its links from where it stands there: those to other pages and
pictures of the site become the site's, all others lead to the repository (`repo_url` in mkdocs.yml).
"""

import ast
import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")
FRONT = {"README.md": "index.md", "README_zh.md": "zh.md"}  # the document in the repository, and its page
REFERENCE = {"reference.md": "ppdiffusers_tome", "reference-inference.md": "ppdiffusers_tome.inference"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files, config):
    """Add the pages that are not in docs/, and the pictures that pages show."""
    for document, page in FRONT.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    for page, module in REFERENCE.items():
        files.append(File.generated(config, page, content=reference(module)))
    for page in list(files.documentation_pages()):
        for picture in re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", page.content_string):
            path = in_repository(picture, page.src_uri)
            if not path.startswith("docs/") and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def reference(module: str) -> str:
    """A page with the docstrings of what a module exports."""
    source = ROOT.joinpath(*module.split("."), "__init__.py").read_text(encoding="utf-8")
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    entries = [f"::: {module}.{name}" for name in names if name != "__version__"]
    return "\n\n".join([f"# `{module}`", f"What `import {module}` provides, from its docstrings.", *entries])


def on_page_markdown(markdown, page, config, files):
    """Change the links of a page, outside of code, and leave out the marks of figures."""

    def change(match):
        return match[1] + link(match[2], page.file.src_uri, config.repo_url, files) + match[3]

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(change, re.sub("<!--.*?-->", "", part)) for part in parts[::2]]
    return "".join(parts)


def link(target: str, page: str, repository: str, files) -> str:
    """Where a link of a page leads in the site, or in the repository."""
    if target.startswith(("http:", "https:", "mailto:", "#")):
        return target
    path, mark, anchor = target.partition("#")
    path = in_repository(path, page)
    if not (ROOT / path).exists():
        LOG.warning("%s: there is no %s", page, target)
    inside = FRONT.get(path, path.removeprefix("docs/"))
    if path in FRONT or path.startswith("docs/") or files.get_file_from_path(path):
        return inside + mark + anchor
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{path}{mark}{anchor}"


def in_repository(target: str, page: str) -> str:
    """The path, from the root of the repository, of what a page's link names."""
    folder = "" if page in FRONT.values() else "docs"
    return posixpath.normpath(posixpath.join(folder, target))
