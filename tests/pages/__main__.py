from tests.pages import PAGES
from tests.support.docs import ROOT

for name, page in PAGES.items():
    (ROOT / "docs" / name).write_text(page(), "utf-8")
