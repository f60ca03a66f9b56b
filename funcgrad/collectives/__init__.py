"""Communication between the devices of a ``shard_map``, each call with its dual for the backward.

A value is either *the same* on all devices along a mesh axis or *differs* between them: parts of
a whole, or terms of a sum.  Each call says which it takes and which it gives, and so what goes
back:

=================  ==============================  ==========  ===========  ==================
call               forward                         takes       gives        backward
=================  ==============================  ==========  ===========  ==================
``copy``           nothing                         same        differs      ``reduce``
``reduce``         sum                             differs     same         ``copy``
``split``          own part                        same        differs      ``gather``
``gather``         parts joined                    differs     same         ``split``
``all_gather``     parts joined, used differently  differs     differs      ``reduce_scatter``
``reduce_scatter`` own part of the sum             differs     differs      ``all_gather``
``all_to_all``     parts exchanged                 differs     differs      ``all_to_all``
``shift``          to the next device              differs     differs      ``shift`` back
=================  ==============================  ==========  ===========  ==================

All are linear and right at any order, in forward mode, and under ``vmap``, ``scan`` and
``checkpoint``.  With ``check_vma=True`` (JAX's default) the types say which values are the same,
a call on the wrong kind is refused, and derivatives may be taken inside ``shard_map`` or around
it.  With ``check_vma=False`` nothing is checked, and derivatives are taken inside: there the
gradient of a value that is the same on all devices is the same on all.  Around such a
``shard_map`` JAX has another convention, and the first four raise where that can be seen.  It
cannot where JAX reuses the derivative of a ``jit``, ``checkpoint`` or ``scan`` that was first
differentiated inside: parts then come out divided by the number of devices.  Keep
``check_vma=True``, or check with ``fg.assert_matches_unsharded``.
"""

from funcgrad.collectives._calls import all_gather as all_gather
from funcgrad.collectives._calls import all_to_all as all_to_all
from funcgrad.collectives._calls import copy as copy
from funcgrad.collectives._calls import gather as gather
from funcgrad.collectives._calls import reduce as reduce
from funcgrad.collectives._calls import reduce_scatter as reduce_scatter
from funcgrad.collectives._calls import shift as shift
from funcgrad.collectives._calls import split as split
