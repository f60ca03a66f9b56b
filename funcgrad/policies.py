"""Policies for ``fg.checkpoint``: which values are kept for the backward pass.

Made by ``save_dots``, ``save_operations``, ``save_names``, ``save_paths``, ``save_where``,
``save_everything``, ``save_nothing``; ``offload`` keeps them on the host; combined by ``|``,
``&`` and ``~``.
"""

from funcgrad._remat._policies import Policy as Policy
from funcgrad._remat._policies import offload as offload
from funcgrad._remat._policies import save_dots as save_dots
from funcgrad._remat._policies import save_everything as save_everything
from funcgrad._remat._policies import save_names as save_names
from funcgrad._remat._policies import save_nothing as save_nothing
from funcgrad._remat._policies import save_operations as save_operations
from funcgrad._remat._policies import save_paths as save_paths
from funcgrad._remat._policies import save_where as save_where
