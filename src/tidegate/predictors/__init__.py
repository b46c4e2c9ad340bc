"""Predictors of output lengths that are more than the core's: learned from records, and the choice by configuration."""
