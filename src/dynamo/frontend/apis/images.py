"""`/v1/images/generations`, for raw engines: the worker gets the client's own body, and its object is the answer."""

from __future__ import annotations

from functools import partial

import msgspec

from dynamo.frontend.apis.results import ResultAnswer, ResultApi, ResultReply
from dynamo.frontend.http.offload import Offload
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.inputs import result_plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.frontend.pipeline.stage_timer import StageTimer
from dynamo.protocol.images import IMAGES, ImageRequest, check_images, validate_image
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import not_built
from dynamo.protocol.vectors.requests import client_body

__all__ = ["ImagesApi"]


class ImagesApi(ResultApi[ImageRequest]):
    """Pictures of a prompt."""

    endpoint = "images"
    id_prefix = "img-"
    model_type = ModelType.Images

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ImageRequest:
        request: ImageRequest = IMAGES.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: ImageRequest) -> None:
        validate_image(request)

    async def plan(
        self, preprocessor: Preprocessor, request: ImageRequest, model: ServedModel, timer: StageTimer
    ) -> ResultPlan:
        if not model.takes_text:
            raise not_built("Images of a model that takes token ids are not in this version", "model")
        return result_plan(preprocessor, request, model, [client_body(request)], 0)

    async def render(self, offload: Offload, request: ImageRequest, answer: ResultAnswer) -> ResultReply:
        found = await offload(partial(check_images, answer.results[0], request))  # megabytes of base64
        return ResultReply(await offload(partial(msgspec.json.encode, found)))
