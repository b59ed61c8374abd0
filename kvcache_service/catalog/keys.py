"""Every Redis key. The hash tag {tenant:model} keeps all keys of one commit in one cluster slot."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "kvcache:1"


@dataclass(frozen=True, order=True)
class Group:
    """What shares one hash tag: one tenant's use of one model."""

    tenant: str
    model_id: str

    @property
    def tag(self) -> str:
        return f"{PREFIX}:{{{self.tenant}:{self.model_id}}}"

    @property
    def revision(self) -> str:
        return f"{self.tag}:revision"

    @property
    def events(self) -> str:
        return f"{self.tag}:events"

    @property
    def epoch(self) -> str:
        return f"{self.tag}:epoch"

    def calibration(self, template_id: str) -> str:
        return f"{self.tag}:calibration:{template_id}"

    def turn(self, turn_id: str) -> str:
        return f"{self.tag}:turn:{turn_id}"


def group_of(tag: str) -> Group:
    """Whose tag it is. Model ids hold no colon."""
    tenant, _, model_id = tag.removeprefix(f"{PREFIX}:{{").removesuffix("}").rpartition(":")
    return Group(tenant, model_id)


def tenant_of(key: str) -> str:
    """Whose a key is that begins with a group's tag."""
    return key.removeprefix(f"{PREFIX}:{{").partition(":")[0]


@dataclass(frozen=True, order=True)
class PoolKey:
    """The anchor pool of one placeholder name; offsets are comparable within one origin only."""

    group: Group
    placeholder: str
    origin: str

    @property
    def key(self) -> str:
        return f"{self.group.tag}:pool:{self.origin}:{self.placeholder}"
