"""Data with a planted truth, from which follows how well a model can do at all."""

from trireme.data.planted.topics import PlantedTopics, planted_topics, recovered

__all__ = ["PlantedTopics", "planted_topics", "recovered"]
