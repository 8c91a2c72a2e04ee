"""The Flyte side: tasks, and what only they need."""

import os
import sys
from pathlib import Path

# `pyflyte run` has the project's directory on sys.path only while it loads the workflow, and takes
# that entry off again. Recipes are imported by name when the task runs, and the ranks get the path
# as it is then. So it is added once more, and the working directory for recipes of the user's own.
sys.path += [str(Path(__file__).parent.parent), os.getcwd()]

from tasks.shipping import check_code, prepare_registration

check_code()
prepare_registration()
