import asyncio

from agentfsm import (
    Agent,
    Handoff,
    PartialRunSummary,
    UserInputRequested,
)


async def main() -> None:
    agent = Agent(model="claude-sonnet-4-6")
    suspension = None

    async for event in agent.run("Do something underspecified"):
        if isinstance(event, UserInputRequested):
            print(f"Question: {event.question}")
            if event.choices:
                print(f"Choices:  {event.choices}")
            suspension = event.suspension_record
            break
        elif isinstance(event, Handoff):  # noqa: RET508
            print(f"Handoff: {event.rationale}")
            for blocker in event.blockers:
                print(f"  - blocked by: {blocker}")
        elif isinstance(event, PartialRunSummary):
            print(f"Missing: {event.missing}")
            print(f"Learned: {event.learned_facts}")

    if suspension is not None:
        reply = "use the monthly series from FRED"
        async for event in agent.resume(suspension, reply):  # noqa: B007
            ...


if __name__ == "__main__":
    asyncio.run(main())
