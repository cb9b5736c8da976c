"""Packages of which nothing was shown on the device that is to serve them."""

from __future__ import annotations

from unittest import mock

from engine import factory
from engine.config import EngineConfig
from engine.cuda.device import CudaDevice
from engine.generation.parts import EngineParts, Tell
from engine.package.package import Package

load_parts = factory.load_parts


def given_settings(package: Package, device: CudaDevice, config: EngineConfig) -> EngineConfig:
    """Take the settings for what a device certificate would have shown."""
    return config


def load_unshown_parts(package: Package, config: EngineConfig, tell: Tell) -> EngineParts:
    """Load such a package in the process of an engine."""
    with mock.patch("engine.cuda.certificate.settings_as_shown", given_settings):
        return load_parts(package, config, tell)
