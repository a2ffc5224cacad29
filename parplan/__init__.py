"""The one name that parplan is imported by.

Its packages are links to the folders at the top of the repository.
"""

from parplan.profiles.displayed import Displayed

Displayed.views = "parplan.report.notebook.views"
