//! The turns of a conversation, as nodes: what was said once is referred to and not sent again.
//!
//! Owns: which turns are part of the next prompt. Refuses to know: models, terminals.

use std::collections::VecDeque;

use sapwood_kernel::{Chunk, Meta, Node};

/// What has been said so far.
pub(super) struct Conversation {
    system: Option<Node>,
    turns: VecDeque<(Node, Node)>,
}

/// Something said by `role`.
pub(super) fn said(role: &'static str, text: &str) -> Node {
    Node::from(Chunk::text(text.to_owned()).with_meta(Meta::default().with_role(role)))
}

impl Conversation {
    pub(super) fn new(system: Option<String>) -> Self {
        Self {
            system: system.map(|text| said("SYSTEM", &text)),
            turns: VecDeque::new(),
        }
    }

    /// Everything said, in order, and `question` behind it.
    pub(super) fn prompt(&self, question: &Node) -> Node {
        let turns = self
            .turns
            .iter()
            .flat_map(|(question, answer)| [question, answer]);
        Node::tree(self.system.iter().chain(turns).chain([question]).cloned())
    }

    pub(super) fn add(&mut self, question: Node, answer: Node) {
        self.turns.push_back((question, answer));
    }

    /// Leaves the oldest turn out; false if there is none.
    pub(super) fn forget_oldest(&mut self) -> bool {
        self.turns.pop_front().is_some()
    }

    pub(super) fn clear(&mut self) {
        self.turns.clear();
    }

    /// Sets the system message of all prompts to come; an empty one is none.
    pub(super) fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| said("SYSTEM", text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_prompt_is_everything_said_until_the_oldest_is_forgotten() {
        let mut conversation = Conversation::new(Some("s ".into()));
        conversation.add(said("USER", "q1 "), said("ASSISTANT", "a1 "));
        conversation.add(said("USER", "q2 "), said("ASSISTANT", "a2 "));
        let question = said("USER", "q3");
        let text = async |conversation: &Conversation| {
            let bytes = conversation.prompt(&question).whole().await.unwrap();
            String::from_utf8(bytes.to_vec()).unwrap()
        };
        assert_eq!(text(&conversation).await, "s q1 a1 q2 a2 q3");
        assert!(conversation.forget_oldest());
        assert_eq!(text(&conversation).await, "s q2 a2 q3");
        conversation.set_system("");
        assert!(conversation.forget_oldest() && !conversation.forget_oldest());
        assert_eq!(text(&conversation).await, "q3");
    }
}
