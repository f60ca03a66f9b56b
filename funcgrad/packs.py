"""Ready packs for ``fg.saved_tensor_hooks``: ``fg.saved_tensor_hooks(fun, *fg.packs.int8)``.

``bfloat16`` (relative error ``2**-8``), ``int8`` (error 1/254 of the row's largest value) and
``host`` (exact, in the memory of the host).
"""

from funcgrad._remat._packs import Pack as Pack
from funcgrad._remat._packs import bfloat16 as bfloat16
from funcgrad._remat._packs import host as host
from funcgrad._remat._packs import int8 as int8
