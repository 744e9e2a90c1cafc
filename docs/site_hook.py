"""MkDocs hook of the site: pages, examples and pictures from outside of docs/, and links that lead out of it.

A page of the site is a document of the repository, with its links from where it stands there: those to other documents
and pictures become the site's, and the documents become pages. All others lead to the repository (`repo_url` in
mkdocs.yml), or are plain text where its address is not known.
"""

import ast
import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")
FRONT = {"README.md": "index.md", "README_zh.md": "zh/index.md"}  # the document in the repository, and its page
REFERENCE = {"reference.md": "ppdiffusers_tome", "reference-inference.md": "ppdiffusers_tome.inference"}
LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)")
BADGES = re.compile(r"^!\[[^]]*\]\(https://img\.shields\.io/.*\n", re.MULTILINE)  # which another host would serve
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files, config):
    """Add the pages that are not in docs/, and what pages outside of it link to or show."""
    for document, page in FRONT.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    for page, module in REFERENCE.items():
        files.append(File.generated(config, page, content=reference(module)))
    pages = list(files.documentation_pages())
    for page in pages:  # which grows
        for _, target in LINK.findall(page.content_string):
            path = in_repository(target.partition("#")[0], page.src_uri)
            is_new = (ROOT / path).is_file() and files.get_file_from_path(in_site(path)) is None
            if is_new and is_example(path):
                files.append(File.generated(config, in_site(path), content=example(path)))
            elif is_new and path.endswith((".md", ".png", ".jpg")):
                files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
                if path.endswith(".md"):
                    pages.append(files.get_file_from_path(path))
    return files


def is_example(path: str) -> bool:
    """Whether a path is that of a script in examples/, which becomes a page."""
    return posixpath.dirname(path) == "examples" and path.endswith(".py")


def example(path: str) -> str:
    """A page with a script."""
    return f"# `{posixpath.basename(path)}`\n\n```python\n{(ROOT / path).read_text(encoding='utf-8')}```\n"


def reference(module: str) -> str:
    """A page with the docstrings of what a module exports."""
    path = ROOT.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    entries = [f"::: {module}.{name}" for name in names if name != "__version__"]
    return "\n\n".join([f"# `{module}`", f"What `import {module}` provides, from its docstrings.", *entries])


def on_page_markdown(markdown, page, config, files):
    """Change the links of a page, outside of code, and leave out the marks of figures and the badges."""

    def change(match):
        target = link(match[2], page.file.src_uri, config.repo_url, files)
        return f"[{match[1]}]({target})" if target else match[1]

    parts = CODE.split(BADGES.sub("", markdown))
    parts[::2] = [LINK.sub(change, re.sub("<!--.*?-->", "", part)) for part in parts[::2]]
    return "".join(parts)


def link(target: str, page: str, repository: str | None, files) -> str | None:
    """Where a link of a page leads in the site, or in the repository; None if that is not known."""
    if target.startswith(("http:", "https:", "mailto:", "#")):
        return target
    path, mark, anchor = target.partition("#")
    path = in_repository(path, page)
    if not (ROOT / path).exists():
        LOG.warning("%s: there is no %s", page, target)
    if files.get_file_from_path(in_site(path)):
        return posixpath.relpath(in_site(path), posixpath.dirname(page) or ".") + mark + anchor
    if not repository:
        return None
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{path}{mark}{anchor}"


def in_repository(target: str, page: str) -> str:
    """The path, from the root of the repository, of what a page's link names; of a folder that of its README.md."""
    document = document_of(page)
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target)) if target else document
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def document_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    for document, front in FRONT.items():
        if page == front:
            return document
    return f"docs/{page}" if (ROOT / "docs" / page).is_file() else page


def in_site(path: str) -> str:
    """The path in the site of a document, script or picture of the repository."""
    page = path.removesuffix(".py") + ".md" if is_example(path) else path
    return FRONT.get(page, page.removeprefix("docs/"))
