"""Cluster: connecting to Ray, or starting one here, and leaving it; whatever the tasks are.

`start_ray` asks first whether anything listens and tries a late start once more; `leave_ray` lets tasks in flight
end by themselves; `signals_later` keeps a signal from ending either half-way.
"""

from packsvc.cluster.starting import check_listens, leave_ray, signals_later, start_ray

__all__ = ["check_listens", "leave_ray", "signals_later", "start_ray"]
