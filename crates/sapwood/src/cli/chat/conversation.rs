//! The turns of a conversation as nodes; earlier turns are referenced and not sent again.

use std::collections::VecDeque;

use sapwood_kernel::{Chunk, Meta, Node};
use serde_json::{Value, json};

/// The conversation so far.
pub(super) struct ChatHistory {
    system: Option<(String, Node)>,
    turns: VecDeque<ChatTurn>,
}

/// A question and its answer, as nodes for the next prompt and as text for people.
pub(super) struct ChatTurn {
    pub(super) question: (String, Node),
    pub(super) answer: (String, Node),
}

/// A node of text by `role`.
pub(super) fn message_node(role: &'static str, text: &str) -> Node {
    Node::from(Chunk::text(text.to_owned()).with_meta(Meta::default().with_role(role)))
}

impl ChatHistory {
    pub(super) fn new(system: Option<String>) -> Self {
        let mut conversation = Self {
            system: None,
            turns: VecDeque::new(),
        };
        conversation.set_system(system.as_deref().unwrap_or_default());
        conversation
    }

    /// All turns in order, followed by `question`.
    pub(super) fn prompt(&self, question: &Node) -> Node {
        let turns = self
            .turns
            .iter()
            .flat_map(|turn| [&turn.question.1, &turn.answer.1]);
        let system = self.system.iter().map(|(_, node)| node);
        // A tree of nodes and not one text, so that the server applies its own chat template to the roles.
        Node::tree(system.chain(turns).chain([question]).cloned())
    }

    pub(super) fn add(&mut self, turn: ChatTurn) {
        self.turns.push_back(turn);
    }

    /// Drops the oldest turn; false if there is none.
    pub(super) fn drop_oldest(&mut self) -> bool {
        self.turns.pop_front().is_some()
    }

    /// Drops the last turn and returns its question, to ask it again.
    pub(super) fn take_back(&mut self) -> Option<String> {
        self.turns.pop_back().map(|turn| turn.question.0)
    }

    pub(super) fn clear(&mut self) {
        self.turns.clear();
    }

    /// The system message.
    pub(super) fn system(&self) -> Option<&str> {
        self.system.as_ref().map(|(text, _)| text.as_str())
    }

    /// Sets the system message of all later prompts; an empty one removes it.
    pub(super) fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| (text.to_owned(), message_node("SYSTEM", text)));
    }

    /// All messages with their roles.
    fn messages(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let system = self.system().map(|text| ("system", text));
        let turns = self.turns.iter().flat_map(|turn| {
            [
                ("user", turn.question.0.as_str()),
                ("assistant", turn.answer.0.as_str()),
            ]
        });
        system.into_iter().chain(turns)
    }

    /// The same as text for people, or as JSON: an array of `{"role", "content"}`.
    pub(super) fn written(&self, json: bool) -> String {
        if json {
            let messages = self.messages();
            let messages: Value = messages
                .map(|(role, content)| json!({"role": role, "content": content}))
                .collect();
            return format!("{messages:#}\n");
        }
        self.messages()
            .map(|(role, content)| format!("{role}: {}\n\n", content.trim_end()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(question: &str, answer: &str) -> ChatTurn {
        ChatTurn {
            question: (question.into(), message_node("USER", question)),
            answer: (answer.into(), message_node("ASSISTANT", answer)),
        }
    }

    #[tokio::test]
    async fn a_prompt_has_all_turns_until_the_oldest_is_dropped() {
        let mut conversation = ChatHistory::new(Some("s ".into()));
        conversation.add(turn("q1 ", "a1 "));
        conversation.add(turn("q2 ", "a2 "));
        let question = message_node("USER", "q3");
        let text = async |conversation: &ChatHistory| {
            let bytes = conversation.prompt(&question).whole().await.unwrap();
            String::from_utf8(bytes.to_vec()).unwrap()
        };
        assert_eq!(text(&conversation).await, "s q1 a1 q2 a2 q3");
        assert_eq!(
            conversation.written(false),
            "system: s\n\nuser: q1\n\nassistant: a1\n\nuser: q2\n\nassistant: a2\n\n"
        );
        assert!(conversation.drop_oldest());
        assert_eq!(text(&conversation).await, "s q2 a2 q3");
        conversation.set_system("");
        let written: Value = serde_json::from_str(&conversation.written(true)).unwrap();
        assert_eq!(
            written,
            json!([{"role": "user", "content": "q2 "}, {"role": "assistant", "content": "a2 "}])
        );
        assert_eq!(conversation.take_back().as_deref(), Some("q2 "));
        assert!(!conversation.drop_oldest() && conversation.take_back().is_none());
        assert_eq!(text(&conversation).await, "q3");
    }
}
