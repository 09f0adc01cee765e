"""`keep_body`: what was asked for is there for as long as what was answered, and not a moment longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.contract.contract_driver import Driver
