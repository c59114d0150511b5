"""Facade: `dynamo.engines.sample.diffusion_main` under the path of the guide."""

from dynamo.engines.sample.diffusion_main import *  # noqa: F403
from dynamo.engines.sample.diffusion_main import __all__ as __all__

if __name__ == "__main__":
    main()  # noqa: F405
