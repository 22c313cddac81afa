"""Data with a planted truth, from which follows how well a model can do at all.

They need `trireme-train[tables]`.
"""

from trireme.data.planted.clicks import PlantedBlock, PlantedClicks
from trireme.data.planted.regression import PlantedRegression, PlantedRows
from trireme.data.planted.topics import PlantedTopics, planted_topics, recovered
from trireme.data.ranking import area_under_curve

__all__ = [
    "PlantedBlock",
    "PlantedClicks",
    "PlantedRegression",
    "PlantedRows",
    "PlantedTopics",
    "area_under_curve",
    "planted_topics",
    "recovered",
]
