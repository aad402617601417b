r"""`GoogleSearch`: questions that are answered with a search engine and a browser.

Failed searches, unreachable pages and exhausted quotas are tool outputs, not failures of the rollout.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StringConstraints,
    model_validator,
)
from typing_extensions import Self

from gym_serve.environments.google_search.pages import PageText, WebPages
from gym_serve.environments.google_search.web import (
    ERROR,
    EXAMPLE,
    Cassette,
    CustomSearch,
    LiveWeb,
    RecordedWeb,
    Web,
)
from gym_serve.grading import last_box, not_in_the_box, plain_answer, replace_surrogates, same_text
from gym_serve.metrics import MetricSpec, Score
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest, tool
from gym_serve.servers.base import missing_package, missing_path

_FAILURES = tuple(f'{{"{field}":"{ERROR}' for field in ("search_results", "page_content"))

Query = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]


class SearchResult(BaseModel):
    """What `GoogleSearch.search` answers."""

    search_results: str
    """JSON text, ``{"items": [{"title", "link", "displayLink", "snippet"}]}``, or ``Error: ...``."""


class BrowseResult(BaseModel):
    """What `GoogleSearch.browse` answers."""

    page_content: str  # text of the page, ``No text found``, or ``Error: ...``


class SearchRequest(VerifyRequest):
    """A question with the response to it."""

    expected_answer: str = Field(pattern=r"\S")  # the right option's letter, or a short text


class SearchVerdict(Verdict):
    """The reward and what it was given for."""

    parsed_option: str | None  # what the last message has in its box; None if it has none
    failed_calls: int  # tool calls whose answer tells of a failure


class GoogleSearch(ResourcesServer):
    """Questions with search and browse: reward 1.0 for the expected answer in a box, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    restorable: ClassVar[bool] = True
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy", "reward"),), answer="parsed_option")

    class Config(ResourcesServer.Config):
        google_api_key: SecretStr | None = None
        """Key of the Custom Search JSON API; not needed to replay."""
        google_cx: SecretStr | None = None
        """Id of the Programmable Search Engine; not needed to replay."""
        mode: Literal["live", "record", "replay"] = "live"
        """``record`` answers from the cassette what is there, and appends what is not; ``replay`` never
        touches the network; read at the start only."""
        cassette: Path | None = None
        """File of recorded answers; by default, to replay, the one with the answers for the example rows."""
        request_timeout: PositiveFloat = 20.0
        """Seconds for one request to Google, and for one page with its redirects; read at the start only."""
        max_retries: int = Field(3, ge=0)
        """Further attempts after a 429, a 5xx and a broken connection; read at the start only."""
        max_page_bytes: PositiveInt = 5 << 20
        """Limit of a page; read at the start only."""
        max_page_words: PositiveInt = 10_000
        """Words of a page that the model is shown; a longer one loses its middle; read at the start only."""
        extraction_timeout: PositiveFloat = 20.0
        """Seconds for finding the text of a page; read at the start only."""
        num_processes: PositiveInt = 2
        """Processes that do that in each replica; read at the start only."""

        @model_validator(mode="after")
        def _complete(self) -> Self:
            if self.mode != "replay" and (self.google_api_key is None or self.google_cx is None):
                needs = "`google_api_key` and `google_cx`; mode replay does not"
                raise ValueError(f"mode {self.mode} needs {needs}")
            if self.mode == "record" and self.cassette is None:
                raise ValueError("mode record needs `cassette`, the file to record into")
            return self

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        if config.mode != "replay":
            yield from missing_package("trafilatura", "gym-serve[google_search]")
        elif config.cassette is not None:
            yield from missing_path("cassette", config.cassette)

    def __init__(self, *, web: Web | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._given = web
        self._web: Web | None = None

    async def start(self) -> None:
        self._web = self.manage(self._open())
        await super().start()

    @tool
    async def search(self, query: Query) -> SearchResult:
        """Search Google for a query and return up to 10 search results.

        Args:
            query: The term to search for.
        """
        assert self._web is not None  # started
        return SearchResult(search_results=await self._web.search(query))

    @tool
    async def browse(self, url: str) -> BrowseResult:
        """Return the text of a web page. A page that is too long loses its middle.

        Args:
            url: The URL of the page.
        """
        assert self._web is not None  # started
        return BrowseResult(page_content=await self._web.browse(url))

    async def verify(self, request: SearchRequest) -> SearchVerdict:
        option = boxed_option(request.response)
        right = option is not None and same_option(request.expected_answer, option)
        failed = sum(output.startswith(_FAILURES) for output in request.response.tool_outputs.values())
        text = request.response.last_text
        reason = None if right else not_in_the_box(request.expected_answer, option, text)
        return SearchVerdict(reward=float(right), reason=reason, parsed_option=option, failed_calls=failed)

    def _open(self) -> Web:
        config = self.config
        if config.mode == "replay":
            return RecordedWeb(Cassette(config.cassette or EXAMPLE, record=False), None)
        live = self._given or self._live()
        if config.cassette is None or config.mode == "live":
            return live
        return RecordedWeb(Cassette(config.cassette, record=True), live)

    def _live(self) -> LiveWeb:
        config = self.config
        assert config.google_api_key is not None  # checked with the config
        assert config.google_cx is not None
        engine = CustomSearch(
            config.google_api_key, config.google_cx, config.request_timeout, config.max_retries
        )
        pages = WebPages(config.max_page_bytes, config.request_timeout, config.max_retries)
        text = PageText(config.max_page_words, config.extraction_timeout, config.num_processes)
        return LiveWeb(engine, pages, text)


def boxed_option(response: Response) -> str | None:
    """What the last box of the last message holds; None where the response does not end with a message."""
    messages = response.messages
    if not messages or response.output[-1] is not messages[-1]:
        return None  # it was cut off before it answered
    option = last_box(response.last_text)
    return None if option is None else replace_surrogates(option)


def same_option(expected: str, option: str) -> bool:
    r"""Whether two answers are the same but for space, delimiters and ``\text{}`` around them; around the
    letter of an option, also for punctuation.
    """
    if same_text(expected, option):
        return True
    letter = expected.strip()
    return len(letter) == 1 and letter.isalpha() and same_text(letter, plain_answer(option).strip("()[].:* "))
