"""What every table of a profile is, and the kinds of value in them. Unknown keys and near misses are refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
LayerIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Convention = Literal["output_of_layer", "input_to_layer"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]  # what an argument of a command can hold
