"""YAML as settings are written in it: plain values, and no key twice in a table."""

from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's, which would let the last of two equal keys win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            # why: what a merge (`<<`) brings along may be said again, that is what it is for
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, Hashable):
                if key in seen:
                    text = f"the key {key!r} of line {seen[key]} stands again in line {line}; keep one"
                    raise yaml.constructor.ConstructorError(None, None, text, None)
                seen[key] = line
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """What `text` says; raises `yaml.YAMLError`, also for a key that stands twice in a table.

    The error tells its line, and never what stands there.
    """
    # why: it is a SafeLoader, which makes plain values only
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        for mark in (error.context_mark, error.problem_mark):
            # why: the line may hold a password
            if mark is not None:
                mark.buffer, mark.name = None, "the file"
        raise
