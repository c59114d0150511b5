"""Container images without a container engine and without a registry: `make image`.

A layer is a tar file and an image is a folder of such files with two documents, so Debian's packages and pip are enough.
The modules, from the bottom: `layers` (reproducible tar files), `layout` (the folder of an image), `base` (Debian's packages),
`python_layer` (what pip installs), `sbom` (what is inside), `containerfile` (the settings of an image), `kinds` (the three
images), `__main__` (the command).
"""

__all__: list[str] = []
