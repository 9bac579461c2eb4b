"""The base of all models."""

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Has the fields that the server sent. Those that this version of the package does not know are attributes, too."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
