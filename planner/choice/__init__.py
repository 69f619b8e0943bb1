"""What carries a collective: NCCL in its several ways, or NVSHMEM; and what each release of XLA would take.

setting = Setting(machine=machine, calibration=default_calibration(machine.name), libraries=NEWEST)
print(choose(operation(Collective.PERMUTE, 2**25, 16), setting, (rule_set("xla-0.8.1"),)).decided_by)
"""

from shardroute.planner.choice.choose import Choice, Verdict, choose
from shardroute.planner.choice.hlo import HloModule, parse_hlo, read_hlo
from shardroute.planner.choice.operations import NEWEST, Libraries, Operation, Version, operation, permute
from shardroute.planner.choice.ways import Option, Setting, Way, options
from shardroute.planner.choice.xla import RULE_SETS, Assigned, RuleSet, assign, hazards, rule_set

__all__ = [
    "NEWEST",
    "RULE_SETS",
    "Assigned",
    "Choice",
    "HloModule",
    "Libraries",
    "Operation",
    "Option",
    "RuleSet",
    "Setting",
    "Verdict",
    "Version",
    "Way",
    "assign",
    "choose",
    "hazards",
    "operation",
    "options",
    "parse_hlo",
    "permute",
    "read_hlo",
    "rule_set",
]
