"""The graph of a function, as data and to look at."""

from funcgrad._graph._data import Call as Call
from funcgrad._graph._data import Edge as Edge
from funcgrad._graph._data import Node as Node
from funcgrad._graph._data import Saved as Saved
from funcgrad._graph._data import Value as Value
from funcgrad._graph._graph import Graph as Graph
from funcgrad._graph._read import graph as graph
