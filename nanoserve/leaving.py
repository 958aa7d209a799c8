"""How requests leave an engine before they are answered, and what becomes of those that were in a step that failed.

Knows who is told of an error, and that mostly one request makes a step fail: the others run again. Refuses to know why
it failed.
"""

from collections.abc import Sequence

from nanoserve.answer import Answers, Inboxes
from nanoserve.batch import PooledMemory, SeparateMemory
from nanoserve.logprobs import PromptLogprobs
from nanoserve.request import Request
from nanoserve.scheduler import Scheduler
from nanoserve.seats import Scheduled
from nanoserve.weights import LoadedModel


class Leaving:
    """The part of an engine that lets requests go, and takes them back."""

    loaded: LoadedModel
    _scheduler: Scheduler
    _memory: PooledMemory | SeparateMemory
    _answers: Answers
    _prompt_logprobs: PromptLogprobs
    _inboxes: Inboxes

    def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds. Raises RequestError when it is unknown or has finished."""
        for request in self._scheduler.abort(request_id):
            self._drop(request.request_id)

    def take_failures(self) -> list[tuple[str, Exception]]:
        """Requests that could not go on since this was last asked, and why; `step` does not raise what is taken here.

        Those whose stream is read are not among them.
        """
        taken, self._inboxes.errors = self._inboxes.errors, []
        return taken

    def _take_back(self, scheduled: Sequence[Scheduled], error: Exception) -> None:
        """Nobody knows whose fault it was, unless there was only one: the others run again, each alone."""
        if len(scheduled) == 1 and not scheduled[0].is_padding:
            self._scheduler.counts.num_failed_steps += 1
            self._fail(scheduled[0].request, error)
            return
        for request in self._scheduler.take_back():
            self._memory.release(request.request_id)
            if request.finish_reason is not None:
                self._drop(request.request_id)
            elif request.request_id in self._answers:
                self._answers.of(request).sampler.rewind(request.num_output_tokens, self.loaded.config.vocab_size)

    def _abort_all(self, scheduled: Sequence[Scheduled], error: BaseException) -> None:
        """Somebody wants all of it to end."""
        for each in scheduled:
            if each.request.finish_reason is None:
                self.abort(each.request.request_id)
                self._inboxes.get(each.request.request_id, []).append(error)

    def _fail(self, request: Request, error: Exception) -> None:
        if request.finish_reason is None:
            self.abort(request.request_id)
        self._inboxes.fail(request.request_id, error)

    def _drop(self, request_id: str) -> None:
        self._memory.release(request_id)
        self._answers.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)
