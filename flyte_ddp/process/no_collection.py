"""Stop Python's garbage collector in the process that imports this module, until it is enabled
again.

The server that ranks are forked from imports this module before all others. The imports of torch
and its packages make half a million objects that live as long as the process. A collector that
visits them takes a tenth of the processor time of the imports.
"""

from __future__ import annotations

import gc

gc.disable()
