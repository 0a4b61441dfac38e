"""Which JSON schemas can be kept to: the rest is refused rather than followed in part.

outlines-core writes regular expressions for schemas. It passes over keywords that it does not know,
and over some that it knows where others take precedence.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from emsjax.checks import refuse, shown
from emsjax.text.patterns import outlines_module, without_anchors

# Keywords that describe and do not constrain.
NOTES = (
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"}
    | {"description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly"}
    # An object has no properties but its own, and arrays with `prefixItems` no more items.
    | {"additionalProperties", "additionalItems"}
)
# Keywords that are kept to together: each of these sets, or a part of it, may be a schema.
LENGTHS, ITEMS = {"minLength", "maxLength"}, {"items", "minItems", "maxItems"}
TOGETHER = (
    {"$ref"},
    {"anyOf"},
    {"oneOf"},
    {"allOf"},
    {"type", "enum"},
    {"type", "const"},
    {"type", "properties", "required"},
    {"type", "prefixItems"},
    {"type", "pattern"},
    {"type", "format"},
    {"type"} | LENGTHS | ITEMS,
)
KNOWN = set().union(NOTES, *TOGETHER)


def json_schema(schema: Mapping[str, Any] | str) -> str:
    """A regular expression that matches JSON documents of a schema.

    Objects have their properties in the schema's order and no others, and between the parts of a
    document there is one space or none. An array without `items` and an object without
    `properties` hold anything, a few levels deep, which takes seconds to compile. A `pattern`
    matches whole strings as they are written in JSON, so it must not match a quotation mark.

    Args:
        schema: a JSON schema, or its JSON text.

    Raises:
        ImportError: outlines-core is missing.
        ValueError: it is no JSON schema, it refers to itself, or it has a keyword, or several
            together, that would not be kept to.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, Mapping):
        refuse("the JSON schema", "a mapping or the JSON text of one", schema)
    checked = _checked(schema, schema, ())
    try:
        text = json.dumps(checked, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from error
    try:
        return outlines_module().json_schema.build_regex_from_schema(text)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the JSON schema is not supported: {reason}") from error


def _refuse(schema: Any, reason: str) -> NoReturn:
    raise ValueError(f"the JSON schema is not supported: {reason} in {shown(schema)}")


def _checked(schema: Any, root: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A schema without references, its patterns in groups.

    Args:
        root: the whole schema.
        path: the references that led here.

    Raises:
        ValueError: it is not supported.
    """
    if not isinstance(schema, Mapping) or not all(isinstance(name, str) for name in schema):
        _refuse(schema, "something other than keywords")
    if unknown := sorted(schema.keys() - KNOWN):
        _refuse(schema, f"the keyword {unknown[0]}")
    rules = schema.keys() - NOTES
    if not rules:
        _refuse(schema, "no type")
    if not any(rules <= group for group in TOGETHER):
        _refuse(schema, f"{', '.join(sorted(rules))} together")
    if "$ref" in rules:
        reference = schema["$ref"]
        if reference in path:
            _refuse(schema, "a reference to a schema that holds it")
        return _checked(_target(schema, root), root, [*path, reference])
    found = {name: schema[name] for name in rules}
    for name in ("enum", "anyOf", "oneOf", "allOf", "prefixItems"):
        if name in rules and (not isinstance(schema[name], list | tuple) or not schema[name]):
            _refuse(schema, f"{name} without a list")
        if name in rules and name != "enum":
            found[name] = [_checked(one, root, path) for one in schema[name]]
    if len(schema.get("allOf", ())) > 1:
        _refuse(schema, "allOf of several schemas")
    if "properties" in rules:
        if not isinstance(schema["properties"], Mapping):
            _refuse(schema, "properties without a mapping")
        found["properties"] = {
            name: _checked(one, root, path) for name, one in schema["properties"].items()
        }
    for name in schema.get("required", ()):
        if name not in schema.get("properties", ()):
            _refuse(schema, f"the required {shown(name)}, which is not a property,")
    if "items" in rules:
        found["items"] = _checked(schema["items"], root, path)
    others = schema.get("additionalProperties", True)
    if "properties" not in rules and others is not True:
        found["additionalProperties"] = _checked(others, root, path)
    if isinstance(pattern := schema.get("pattern"), str):
        found["pattern"] = f"^(?:{without_anchors(pattern)})$"
    return found


def _target(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The part of `root` that a schema refers to.

    Raises:
        ValueError: there is no such part.
    """
    reference = schema["$ref"]
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        _refuse(schema, "a reference to another document")
    found: Any = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            _refuse(schema, "a reference to nothing")
        found = found[name]
    return found
