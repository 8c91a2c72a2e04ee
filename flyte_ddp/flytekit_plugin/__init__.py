"""What a Flyte task needs of this library. The one package of it that imports flytekit."""
