"""A whole private mesh on one machine: serving nodes and an entry node, each a process with a home of its own.

Nothing is wired by hand: the first node opens a mesh, the others join by its invite and find each other as strangers
would. All listen on the loopback alone.

plan(...) -> Plan              what is to run; refuses what cannot work before anything starts
up(folder, plan, say) -> Lab   brings it up; the first fault of a child is raised, and everything is taken down
passing(folder, plan, say)     a lab for the length of a block; its nodes end with this process, however it ends
sweep(folder)                  removes what killed passing labs left
find(folder) -> Lab | None     the lab that is up
Lab.status(), Lab.down()
"""

from .lab import Lab, busy, find, folder_of, passing, sweep, up
from .plan import Plan, plan

__all__ = ["Lab", "Plan", "busy", "find", "folder_of", "passing", "plan", "sweep", "up"]
